"""`config.pbtxt`: read, completed, overridden, checked."""
