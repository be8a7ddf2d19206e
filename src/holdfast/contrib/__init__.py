"""Parts that plug Holdfast into other projects; imported only when asked for."""
