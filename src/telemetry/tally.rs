//! How often each event has happened in this process, and when: for the inspector, which has figures where nobody has
//! installed a recorder.
//!
//! Counting is an addition. The totals are put aside at the end of each interval, by whoever counts or reads first
//! in the next one; what happened in an interval is the difference of two totals, so that nothing is counted twice or lost.

use std::{
    collections::VecDeque,
    sync::{
        LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::Event;

/// What one bar of a plot stands for: fine enough to see when something began.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// So many are remembered: the last quarter of an hour.
pub(crate) const INTERVALS: usize = 90;

const EVENTS: usize = Event::ALL.len();

/// All engines of the process: events do not say whose they are.
pub(crate) struct Tally {
    began: Instant,
    totals: [AtomicU64; EVENTS],
    /// The interval that is counted now.
    current: AtomicU64,
    /// The totals at the end of each interval before it, the oldest first.
    past: Mutex<VecDeque<[u64; EVENTS]>>,
    swept: Mutex<Swept>,
}

/// One event.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) event: Event,
    /// Since the process has counted.
    pub(crate) total: u64,
    /// In each of the last intervals, the one that is not over last.
    pub(crate) lately: Vec<u64>,
}

/// What sweepers of this process have done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Swept {
    pub(crate) rows: u64,
    /// When the last round was over, and how many rows it has deleted.
    pub(crate) last: Option<(Instant, u64)>,
}

/// That of the process, which begins with its first engine.
pub(crate) fn tally() -> &'static Tally {
    static TALLY: LazyLock<Tally> = LazyLock::new(Tally::new);
    &TALLY
}

impl Tally {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            totals: [const { AtomicU64::new(0) }; EVENTS],
            current: AtomicU64::new(0),
            past: Mutex::default(),
            swept: Mutex::default(),
        }
    }

    pub(super) fn count(&self, event: Event) {
        self.count_in(self.interval(), event);
    }

    pub(super) fn swept(&self, rows: u64) {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        swept.rows += rows;
        swept.last = Some((Instant::now(), rows));
    }

    pub(crate) fn sweeps(&self) -> Swept {
        *self.swept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn counted_for(&self) -> Duration {
        self.began.elapsed()
    }

    /// Every event there is.
    pub(crate) fn counted(&self) -> Vec<Counted> {
        self.counted_in(self.interval())
    }

    fn interval(&self) -> u64 {
        self.began.elapsed().as_secs() / INTERVAL.as_secs()
    }

    fn count_in(&self, interval: u64, event: Event) {
        if self.current.load(Ordering::Acquire) < interval {
            drop(self.turn(interval));
        }
        self.totals[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The intervals before this one are over.
    fn turn(&self, interval: u64) -> MutexGuard<'_, VecDeque<[u64; EVENTS]>> {
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        let over = interval.saturating_sub(self.current.load(Ordering::Acquire));
        for _ in 0..over.min(INTERVALS as u64) {
            if past.len() == INTERVALS {
                past.pop_front();
            }
            past.push_back(self.totals());
        }
        self.current.fetch_max(interval, Ordering::Release);
        past
    }

    fn totals(&self) -> [u64; EVENTS] {
        std::array::from_fn(|event| self.totals[event].load(Ordering::Relaxed))
    }

    fn counted_in(&self, interval: u64) -> Vec<Counted> {
        let mut past: Vec<_> = self.turn(interval).iter().copied().collect();
        // As long as the process is young, it has counted from nothing.
        if past.len() < INTERVALS {
            past.insert(0, [0; EVENTS]);
        }
        past.push(self.totals());
        let lately = |event: usize| past.windows(2).map(|two| two[1][event].saturating_sub(two[0][event])).collect();
        let counted = |event: &Event| Counted {
            event: *event,
            total: past.last().map_or(0, |totals| totals[*event as usize]),
            lately: lately(*event as usize),
        };
        Event::ALL.iter().map(counted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tally: &Tally, interval: u64, event: Event) -> (u64, Vec<u64>) {
        let counted = tally.counted_in(interval).into_iter().find(|counted| counted.event == event).unwrap();
        (counted.total, counted.lately)
    }

    #[test]
    fn each_event_is_counted_in_its_interval_and_in_the_total() {
        let tally = Tally::new();
        assert_eq!(of(&tally, 0, Event::Fresh), (0, vec![0]));
        for (interval, event) in [(0, Event::Fresh), (0, Event::Fresh), (2, Event::Fresh), (2, Event::Swept)] {
            tally.count_in(interval, event);
        }
        assert_eq!(of(&tally, 2, Event::Fresh), (3, vec![2, 0, 1]));
        assert_eq!(of(&tally, 3, Event::Swept), (1, vec![0, 0, 1, 0]));
    }

    #[test]
    fn what_is_long_ago_stays_in_the_total_alone() {
        let tally = Tally::new();
        tally.count_in(0, Event::Fresh);
        let last = INTERVALS as u64 - 1;
        let (total, lately) = of(&tally, last, Event::Fresh);
        assert_eq!((total, lately.len(), lately[0], lately.iter().sum::<u64>()), (1, INTERVALS, 1, 1));
        let (total, lately) = of(&tally, last + 1, Event::Fresh);
        assert_eq!((total, lately.len(), lately.iter().sum::<u64>()), (1, INTERVALS, 0));
        tally.count_in(1_000_000, Event::Fresh);
        let (total, lately) = of(&tally, 1_000_000, Event::Fresh);
        assert_eq!((total, lately.len(), lately[INTERVALS - 1], lately.iter().sum::<u64>()), (2, INTERVALS, 1, 1));
    }

    #[test]
    fn threads_that_count_while_intervals_end_lose_nothing() {
        let tally = Tally::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    (0..80).for_each(|interval| (0..50).for_each(|_| tally.count_in(interval, Event::Fresh)))
                });
            }
        });
        let (total, lately) = of(&tally, 80, Event::Fresh);
        assert_eq!((total, lately.iter().sum::<u64>()), (16_000, 16_000));
    }
}
