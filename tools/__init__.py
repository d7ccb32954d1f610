"""Tools of the repository; none is part of the package that is installed."""
