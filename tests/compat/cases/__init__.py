"""What clients do, in groups that share a server: each module has the table `CASES`."""
