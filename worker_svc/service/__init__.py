"""The worker's shell: it dials the scheduler, takes step plans, answers, and says it is alive."""
