"""Reading and writing: paths as users name them, exported folders, a model from whatever a user points at."""
