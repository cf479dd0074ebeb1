"""S3, and a filesystem of fsspec, on a real server: the contract of storages, whole jobs, faults of the network."""
