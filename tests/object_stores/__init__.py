"""S3, and a filesystem of fsspec, on a real server: the contract of storages, whole jobs, and faults of the network between them."""
