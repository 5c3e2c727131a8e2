#!/bin/bash
set -e
cd /app/notes
lost=$(git log -g --all --format='%H %s' | sed -n 's/ Finish the chapter on tides$//p' | head -n 1)
git merge "$lost" || true
printf 'Tides\nSee the almanac.\nThe moon pulls twice a day.\n' >tides.txt
git add tides.txt
git commit -q -m "Merge the chapter on tides"
