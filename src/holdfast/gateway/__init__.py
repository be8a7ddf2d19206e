"""The proxy in front of trainers: "not found" only when it is true."""
