"""The scheduler service: every decision of the server, on a CPU, without torch."""
