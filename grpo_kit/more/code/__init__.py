"""Programs as answers: tasks, rewards and the sandbox that runs what a model wrote."""
