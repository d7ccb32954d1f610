"""Tools of the repository; none is part of the installed package."""
