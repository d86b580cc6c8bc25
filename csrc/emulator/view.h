// What a thread knows to have happened: one count per component of the machine (every thread, and every mbarrier's
// bulk copies). Views are shared and never changed once others can see them; equal knowledge is usually the same
// object.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace emulator {

struct Counts {
    uint32_t references;
    uint32_t at[1];  // components of them
};

class View {
  public:
    View() = default;
    View(const View& other) : counts_(other.counts_) {
        if (counts_ != nullptr) ++counts_->references;
    }
    View(View&& other) noexcept : counts_(std::exchange(other.counts_, nullptr)) {}
    View& operator=(View other) noexcept {
        std::swap(counts_, other.counts_);
        return *this;
    }
    ~View() {
        if (counts_ != nullptr && --counts_->references == 0) free_list().push_back(counts_);
    }

    // Number of components of all views made from now on; earlier ones must be gone.
    static void set_components(uint32_t components) {
        for (Counts* counts : free_list()) std::free(counts);
        free_list().clear();
        size() = components;
    }
    static View nothing() {
        View view = raw();
        std::memset(view.counts_->at, 0, size() * sizeof(uint32_t));
        return view;
    }
    View copy() const {
        View view = raw();
        std::memcpy(view.counts_->at, counts_->at, size() * sizeof(uint32_t));
        return view;
    }

    bool empty() const { return counts_ == nullptr; }
    bool same(const View& other) const { return counts_ == other.counts_; }
    uint32_t operator[](uint32_t component) const { return counts_->at[component]; }
    // Only on a view that nobody else holds.
    void raise(uint32_t component, uint32_t count) {
        if (counts_->at[component] < count) counts_->at[component] = count;
    }
    void raise(const View& other) {
        uint32_t* mine = counts_->at;
        const uint32_t* theirs = other.counts_->at;
        for (uint32_t i = 0, n = size(); i < n; ++i) mine[i] = mine[i] < theirs[i] ? theirs[i] : mine[i];
    }
    bool includes(const View& other) const {
        if (other.empty() || same(other)) return true;
        uint32_t missing = 0;
        for (uint32_t i = 0, n = size(); i < n; ++i) missing |= counts_->at[i] < other.counts_->at[i];
        return missing == 0;
    }

  private:
    static std::vector<Counts*>& free_list() {
        static std::vector<Counts*> list;
        return list;
    }
    static uint32_t& size() {
        static uint32_t components = 0;
        return components;
    }
    static View raw() {
        View view;
        if (free_list().empty()) {
            view.counts_ = static_cast<Counts*>(std::malloc(sizeof(Counts) + size() * sizeof(uint32_t)));
        } else {
            view.counts_ = free_list().back();
            free_list().pop_back();
        }
        view.counts_->references = 1;
        return view;
    }

    Counts* counts_ = nullptr;
};

}  // namespace emulator
