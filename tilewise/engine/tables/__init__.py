"""Which blocks a sequence holds, on the device, in main memory and in files."""
