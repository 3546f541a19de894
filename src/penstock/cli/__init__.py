"""One file a command: parse, call one public function, print."""
