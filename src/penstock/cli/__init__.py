"""One file per command: parse, call one public function, print."""
