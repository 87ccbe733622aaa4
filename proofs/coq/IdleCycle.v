(* T6, cycle average with idle momentum: every block moves at every step, so inside a cycle x travels by up to
   eta times the sum of the whole momenta; p (p - 1)/2 counts them. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From LCSB Require Import FinSum Vectors Blocks BlockDescent IdleMomentum.
Open Scope R_scope.

Lemma psum_INR p : psum INR p = INR p * (INR p - 1) / 2.
Proof. induction p as [|p IH]; [simpl; field|]. rewrite psum_S, IH, S_INR. field. Qed.

(* (a_1 + ... + a_i)^2 <= i (a_1^2 + ... + a_i^2) *)
Lemma square_of_sum (a : nat -> R) i : psum a i ^ 2 <= INR i * psum (fun k => a k ^ 2) i.
Proof.
  pose proof (cauchy_schwarz_sq i (fun _ => 1) a) as C. unfold dot in C.
  rewrite (psum_ext (fun k => 1 * a k) a) in C by (intros; ring).
  rewrite (psum_ext (fun k => 1 * 1) (fun _ => 1)) in C by (intros; ring).
  rewrite psum_const, Rmult_1_r in C.
  rewrite (psum_ext (fun k => a k ^ 2) (fun k => a k * a k)) by (intros; ring). exact C.
Qed.

Section Cycle.
Variables (n p : nat) (blk b : nat -> nat) (grad : vec -> vec) (L eta beta : R) (x m : nat -> vec).
Hypothesis L_nonneg : 0 <= L.
Hypothesis eta_nonneg : 0 <= eta.
Hypothesis lip : lipschitz n grad L.
Hypothesis run : idle_momentum blk b grad eta beta x m.
Let used t := nrm n (proj blk (b t) (grad (x t))).
Let mom t := nrm n (m t).

Lemma travelled_idle s i : (i < p)%nat ->
  nrm n (vsub (x (s + i)%nat) (x s)) <= eta * (sqrt (INR i) * sqrt (psum (fun k => mom (s + k)%nat ^ 2) p)).
Proof.
  intros Hi.
  assert (T : forall k, nrm n (vsub (x (s + k)%nat) (x s)) <= eta * psum (fun j => mom (s + S j)%nat) k).
  { induction k as [|k IH].
    - rewrite Nat.add_0_r. simpl. rewrite Rmult_0_r. apply nrm_le_of_sq; [lra|].
      unfold dot, vsub. rewrite (psum_ext _ (fun _ => 0)) by (intros; ring). rewrite psum_const. right. ring.
    - replace (vsub (x (s + S k)%nat) (x s)) with (axpy (vsub (x (s + k)%nat) (x s)) (- eta) (m (s + S k)%nat)).
      + eapply Rle_trans; [apply nrm_axpy|]. rewrite Rabs_Ropp, Rabs_pos_eq, psum_S by assumption.
        unfold mom at 2. lra.
      + apply functional_extensionality. intros j. unfold vsub, axpy. rewrite !Nat.add_succ_r.
        destruct (run (s + k)%nat) as [_ ->]. unfold axpy. ring. }
  eapply Rle_trans; [apply T|]. apply Rmult_le_compat_l; [assumption|].
  rewrite <- sqrt_mult_alt by apply pos_INR. rewrite <- (sqrt_pow2 (psum (fun j => mom (s + S j)%nat) i))
    by (apply psum_nonneg; intros; apply nrm_nonneg).
  apply sqrt_le_1_alt. eapply Rle_trans; [apply square_of_sum|].
  apply Rmult_le_compat_l; [apply pos_INR|].
  assert (A : psum (fun k => mom (s + k)%nat ^ 2) (1 + i) = mom (s + 0)%nat ^ 2 + psum (fun k => mom (s + S k)%nat ^ 2) i)
    by (rewrite psum_app; simpl psum; f_equal; ring).
  assert (B : psum (fun k => mom (s + k)%nat ^ 2) (1 + i) <= psum (fun k => mom (s + k)%nat ^ 2) p)
    by (apply psum_incr; [intros; apply pow2_ge_0|lia]).
  pose proof (pow2_ge_0 (mom (s + 0)%nat)). lra.
Qed.

Theorem one_cycle_idle s : visits_once n blk b s p ->
  nrm n (grad (x s)) <= sqrt (psum (fun i => used (s + i)%nat ^ 2) p)
    + L * eta * sqrt (INR p * (INR p - 1) / 2) * sqrt (psum (fun i => mom (s + i)%nat ^ 2) p).
Proof.
  intros V. set (U := psum (fun i => used (s + i)%nat ^ 2) p). set (M := psum (fun i => mom (s + i)%nat ^ 2) p).
  assert (U0 : 0 <= U) by (apply psum_nonneg; intros; apply pow2_ge_0).
  assert (M0 : 0 <= M) by (apply psum_nonneg; intros; apply pow2_ge_0).
  assert (P0 : 0 <= INR p * (INR p - 1) / 2) by (rewrite <- psum_INR; apply psum_nonneg; intros; apply pos_INR).
  assert (LE : 0 <= L * eta) by (apply Rmult_le_pos; assumption).
  pose proof (sqrt_pos U). pose proof (sqrt_pos M). pose proof (sqrt_pos (INR p * (INR p - 1) / 2)).
  assert (R0 : 0 <= L * eta * sqrt (INR p * (INR p - 1) / 2) * sqrt M) by (repeat (apply Rmult_le_pos; try assumption)).
  apply nrm_le_of_sq; [lra|]. rewrite <- nrm_sq, <- (cycle_pythagoras n blk b s p) by exact V.
  apply (minkowski p _ (fun i => used (s + i)%nat) (fun i => L * eta * (sqrt (INR i) * sqrt M))); try assumption.
  - intros i Hi. split; [apply nrm_nonneg|].
    replace (proj blk (b (s + i)%nat) (grad (x s)))
      with (axpy (proj blk (b (s + i)%nat) (grad (x (s + i)%nat))) (-1)
            (proj blk (b (s + i)%nat) (vsub (grad (x (s + i)%nat)) (grad (x s)))))
      by (apply functional_extensionality; intros j; unfold axpy, proj, vsub;
          destruct (Nat.eqb (blk j) (b (s + i)%nat)); ring).
    eapply Rle_trans; [apply nrm_axpy|]. fold (used (s + i)). apply Rplus_le_compat_l.
    replace (Rabs (-1)) with 1 by (rewrite Rabs_left; lra). rewrite Rmult_1_l.
    eapply Rle_trans; [apply nrm_proj_le|]. eapply Rle_trans; [apply lip|].
    rewrite Rmult_assoc. apply Rmult_le_compat_l; [assumption|]. apply travelled_idle, Hi.
  - rewrite pow2_sqrt by exact U0. apply Rle_refl.
  - rewrite (psum_ext _ (fun i => (L * eta) ^ 2 * M * INR i))
      by (intros i _; rewrite !Rpow_mult_distr, !pow2_sqrt by (assumption || apply pos_INR); ring).
    rewrite psum_scal, psum_INR, !(Rpow_mult_distr (L * eta * sqrt _)), (Rpow_mult_distr (L * eta)), !pow2_sqrt
      by assumption. right. ring.
Qed.

Theorem cycles_idle K kappa G : 0 <= kappa -> 0 <= G ->
  (forall k, visits_once n blk b (k * p) p) ->
  psum (fun t => used t ^ 2) (K * p) <= G ->
  psum (fun t => mom t ^ 2) (K * p) <= kappa ^ 2 * psum (fun t => used t ^ 2) (K * p) ->
  psum (fun k => nrm n (grad (x (k * p)%nat)) ^ 2) K
    <= (1 + eta * L * kappa * sqrt (INR p * (INR p - 1) / 2)) ^ 2 * G.
Proof.
  intros Hk HG V HU HM. pose proof (sqrt_pos (INR p * (INR p - 1) / 2)) as P. pose proof (sqrt_pos G) as SG.
  replace ((1 + eta * L * kappa * sqrt (INR p * (INR p - 1) / 2)) ^ 2 * G)
    with ((sqrt G + L * eta * sqrt (INR p * (INR p - 1) / 2) * (kappa * sqrt G)) ^ 2).
  - apply (minkowski_cycles _ used mom p K); try assumption.
    + repeat (apply Rmult_le_pos; try assumption).
    + apply Rmult_le_pos; assumption.
    + intros k. split; [apply nrm_nonneg|]. apply one_cycle_idle, V.
    + rewrite pow2_sqrt by exact HG. exact HU.
    + rewrite Rpow_mult_distr, pow2_sqrt by exact HG. eapply Rle_trans; [exact HM|].
      apply Rmult_le_compat_l; [apply pow2_ge_0|exact HU].
  - transitivity ((1 + eta * L * kappa * sqrt (INR p * (INR p - 1) / 2)) ^ 2 * sqrt G ^ 2); [ring|].
    rewrite pow2_sqrt by exact HG. reflexivity.
Qed.
End Cycle.
