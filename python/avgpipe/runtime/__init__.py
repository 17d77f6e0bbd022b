"""Workers, lanes, links and the scheduler that drives them."""
