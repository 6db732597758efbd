"""Several nodes on one machine: each has network, process, mount, IPC and host name namespaces of its own."""
