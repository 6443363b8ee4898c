"""How far an attention callable is from exact: inputs, and units of error."""
