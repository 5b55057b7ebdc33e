"""Who keeps weights or saved tensors elsewhere: this library, and others."""
