"""Sparse attention over DeepSeek-V4 rows in the commands: cases, probe inputs, bench, inspection."""
