"""What a model can do on a task, before and after: accuracy, readiness, lengths, with intervals."""
