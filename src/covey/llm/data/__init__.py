"""Rows of the user's data: JSONL, Parquet and Arrow files, and the types that training reads them as."""
