"""Named tensors to Router records; what is known about each model family is data."""
