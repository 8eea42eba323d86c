"""Random programs over a batch, to compare what is proved of them with what is true."""
