"""The version, alone in a file so that the build reads it without importing anything."""

VERSION = "0.1.0"
