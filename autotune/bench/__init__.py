"""`autotune bench`: this project's winners against the read-bandwidth limit and every peer that is installed."""
