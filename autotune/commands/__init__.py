"""One module for each command; `lowbit.autotune.cli` assembles them."""
