"""From a command line to one typed config, one run identity and one run directory."""
