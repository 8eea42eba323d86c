"""What planning has recorded, kept on disk for the next question about the same job."""
