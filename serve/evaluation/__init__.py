"""What `octet evaluate` asks: exports in this process, and running servers."""
