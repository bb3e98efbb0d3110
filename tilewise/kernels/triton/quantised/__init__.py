"""Products with weights of 8 and 4 bits on any GPU: values of a part of the weight, then torch."""
