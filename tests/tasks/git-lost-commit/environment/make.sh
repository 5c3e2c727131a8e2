set -e
git config --global user.name Keeper
git config --global user.email keeper@example.org
git init -q -b main notes
cd notes
note() { git add -A && git commit -q "$@"; }
printf 'Tides\n' >tides.txt
printf 'Winds\nTrade winds blow west.\n' >winds.txt
note -m "Begin"
git checkout -q -b tides
printf 'Tides\nThe moon pulls twice a day.\n' >tides.txt
printf 'spring\nneap\n' >words.txt
note -m "Finish the chapter on tides" --author "Ines Waal <ines@example.org>" --date 2024-03-05T06:07:08Z
git checkout -q main
printf 'Tides\nSee the almanac.\n' >tides.txt
note -m "Point to the almanac"
git branch -q -D tides
git checkout -q --orphan scratch
note -m "Draft the chapter on tides"
git checkout -q main
git branch -q -D scratch
