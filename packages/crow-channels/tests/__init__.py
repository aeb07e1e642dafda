"""Tests of crow-channels: whole conversations with a real crow, and a Discord on loopback."""
