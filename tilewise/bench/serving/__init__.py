"""Parts of `bench.serve`: what a server is asked, beside its engine and in virtual time."""
