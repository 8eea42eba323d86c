"""The half of the watch that lives in the process of the script; begins once torch is imported."""
