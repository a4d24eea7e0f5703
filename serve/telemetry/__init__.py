"""What the gateway shows of itself: metrics, traces and logs."""
