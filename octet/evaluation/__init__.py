"""How well artifacts answer held-out text, beside their reference and one another: numpy alone."""
