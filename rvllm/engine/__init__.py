"""Requests as token ids: who runs next, where their cached tokens lie, what each step yields. Knows no text."""
