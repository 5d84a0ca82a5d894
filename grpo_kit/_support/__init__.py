"""What the rooms share: checks of arguments, colours and figures, loading at first use, versions of torch."""
