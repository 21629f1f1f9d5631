"""Stored runs compared: which tasks are the same work, and what changed. Pure; renders nothing."""
