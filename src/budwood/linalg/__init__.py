"""Arrays in, arrays out: metrics, ranks and solvers, without modules, files or logs."""
