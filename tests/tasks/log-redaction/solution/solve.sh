#!/bin/bash
python3 - <<'END'
import json, os, re
byte = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
ip = re.compile(rf"(?<![\d.]){byte}(?:\.{byte}){{3}}(?!\.?\d)")
mail = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
names, key = {}, {}
def rename(kind):
    def name(found):
        known = names.setdefault(kind, {})
        word = found[0].lower()
        if word not in known:
            known[word] = f"{kind}-{len(known) + 1}"
            key[known[word]] = found[0]
        return known[word]
    return name
text = open("/app/mail.log").read()
text = re.sub(r"token=[^\s,]+", "token=***", text)
text = mail.sub(rename("user"), ip.sub(rename("ip"), text))
open("/app/public.log", "w").write(text)
with open(os.open("/app/key.json", os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
    json.dump(key, file)
END
