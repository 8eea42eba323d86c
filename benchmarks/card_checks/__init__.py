"""What is checked on a real card: jobs, plans for them, and what each case takes and gives."""
