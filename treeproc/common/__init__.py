"""What every command of both packages shares: settings, errors, files and object stores, progress, Ray sessions."""
