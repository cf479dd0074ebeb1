"""One module each, as the package lies: room by room. None of them starts a process (`make quick`)."""
