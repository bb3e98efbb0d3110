"""Dense and packed attention: its public functions, registered ops and derivatives."""
