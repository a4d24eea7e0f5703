"""Does a server's numbers come from what it is said to serve? numpy alone; see `judge`."""
