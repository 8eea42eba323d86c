"""Charts that answer to a pointer: their data, and the scripts that a page carries to draw them."""
