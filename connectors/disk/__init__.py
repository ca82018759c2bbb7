"""What stores on local and shared disks have in common: files and their faults, values in them, threads, leases."""
