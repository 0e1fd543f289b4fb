"""Code that all commands share: settings, errors, files and object stores, progress, Ray sessions."""
