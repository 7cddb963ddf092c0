"""A recorded forward pass as a linear map."""
