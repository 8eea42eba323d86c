"""Memory inside single operators, which dispatch does not see: what kernels take and give back."""
