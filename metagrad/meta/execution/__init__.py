"""Running the tasks of a meta-batch: together or one by one, with the checks around them."""
